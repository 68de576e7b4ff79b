"""Train a small GPT on a text of your own, watch its loss, and read what it writes on the way."""

# %% What to learn from: a .txt, .md, .jsonl or .parquet of yours, a folder of them, or the name of a data set on the Hub.
import handgrad

SOURCE = "stories"  # built in: little stories, made by a grammar

data = handgrad.prepare(SOURCE, out="shards/examples", tokenizer="bpe:512", documents=4000)
print(f"{data.tokens('train'):,} tokens to learn from, {data.tokens('validation'):,} to test on")

# %% A run: bit for bit that of `handgrad train tiny --data shards/examples --out runs/examples --steps 500 ...`.
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
run = handgrad.Training("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)
print(run.model())


# %% A hundred steps at a time, and how it writes after them. Interrupt it if you like: this cell goes on where it stopped.
def watch(step):
    if step.step % 50 == 0:
        print(f"step {step.step:3}   loss {step.loss:.3f}   {step.tokens_per_second:6,.0f} tokens/s")


while run.completed < run.config.steps:
    run.steps(100, on_step=watch)
    story = run.model().generate("Once upon a time", max_tokens=40, temperature=0.5, stop="\n")
    print(f"\n    Once upon a time{story}\n")

# %% What the run wrote down; `follow=True` would wait for more, in another notebook while this one trains.
for record in handgrad.metrics(run.folder, "validation"):
    print(f"step {record['step']:3}   validation loss {record['loss']:.3f} {'=' * round(10 * record['loss'])}")

# %% Closed, the run is saved. `handgrad sample`, `evaluate` and `report` take its folder, and so do the next examples.
run.close()
print(run)
