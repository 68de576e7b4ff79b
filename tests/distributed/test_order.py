"""The sequence of collectives: what is agreed on before it begins, and the first difference between ranks."""

import threading
import time

import pytest
import torch.distributed as dist

from handgrad.errors import NumericsError
from handgrad.joins.parallel.heartbeat import Beat, Heartbeat, Seen
from handgrad.joins.parallel.order import RECENT, Order, difference_text, first_difference

STEP = ("losses", "gradients of blocks.1", "gradients of blocks.0", "weights")


def entered(order: Order, step: int, tags: tuple[str, ...] = STEP) -> list[bool]:
    order.begin_step()
    return [order.enter(step, tag) for tag in tags]


def test_a_step_like_the_last_one_needs_no_agreement() -> None:
    order = Order(dist.HashStore(), 2)
    assert entered(order, 0) == [True] * 4
    first = order.digest
    assert entered(order, 1) == [True, False, False, False], "after the weights come the losses, for the first time"
    assert entered(order, 2) == [False] * 4 and order.digest == first and order.count == 12


@pytest.mark.parametrize(
    "tags",
    [
        ("losses", "gradients of blocks.0", "weights"),  # one is left out
        ("losses", "gradients of blocks.0", "gradients of blocks.1", "weights"),  # two are exchanged
        ("losses", "gradients of blocks.1", "gradients of blocks.1", "gradients of blocks.0", "weights"),
        ("losses", "gradients of blocks.1 (half)", "gradients of blocks.0", "weights"),
    ],
)
def test_any_other_one_does(tags: tuple[str, ...]) -> None:
    order = Order(dist.HashStore(), 2)
    for step in range(3):
        entered(order, step)
    digest = order.digest
    news = entered(order, 3, tags)
    assert news.index(True) == next(n for n, (ours, usual) in enumerate(zip(tags, STEP, strict=False)) if ours != usual)
    assert order.digest != digest


def test_without_a_store_nobody_agrees() -> None:
    assert entered(Order(), 0) == [False] * 4


@pytest.mark.parametrize("last", ["gradients", "weights"])
def test_ranks_wait_until_all_have_come_to_the_same(last: str) -> None:
    """Two of three are there: they wait. The third comes with the same tag, or with another one."""
    store, agreed = dist.HashStore(), list[int]()
    orders = [Order(store, 3) for _ in range(3)]

    def come(rank: int, tag: str) -> None:
        orders[rank].enter(0, tag)
        orders[rank].agree()
        agreed.append(rank)

    ranks = [threading.Thread(target=come, args=(rank, "gradients"), daemon=True) for rank in range(2)]
    ranks.append(threading.Thread(target=come, args=(2, last), daemon=True))
    for thread in ranks[:2]:
        thread.start()
    time.sleep(0.05)
    assert not agreed
    ranks[2].start()
    for thread in ranks:
        thread.join(60 if last == "gradients" else 0.1)
    assert sorted(agreed) == ([0, 1, 2] if last == "gradients" else [])
    store.set("collective/1", "")  # lets those go that wait


def test_an_agreement_is_of_one_collective() -> None:
    """Two ranks have agreed on the first: the second waits for both again."""
    store = dist.HashStore()
    orders = [Order(store, 2) for _ in range(2)]

    def come(rank: int, tag: str) -> threading.Thread:
        orders[rank].enter(0, tag)
        thread = threading.Thread(target=orders[rank].agree, daemon=True)
        thread.start()
        return thread

    for thread in [come(rank, "losses") for rank in range(2)]:
        thread.join(60)
        assert not thread.is_alive()
    early = come(0, "weights")
    early.join(0.05)
    assert early.is_alive()
    come(1, "weights").join(60)
    early.join(60)
    assert not early.is_alive()


def test_the_first_difference_is_found() -> None:
    """Among the numbers that two ranks remember; a rank that has not come so far is not asked."""
    usual = [(7, 3, "a"), (8, 3, "b"), (9, 3, "c")]
    assert first_difference({0: usual, 1: usual[1:], 2: []}) == {}
    assert first_difference({0: usual, 1: [(7, 3, "a"), (8, 3, "c")], 2: usual[:1]}) == {(3, 8, "b"): [0], (3, 8, "c"): [1]}
    sides = first_difference({0: usual, 1: usual, 2: [(9, 4, "c")]})
    assert sides == {(3, 9, "c"): [0, 1], (4, 9, "c"): [2]}
    stands = "ranks 0, 1 at step 3, collective 9, c; rank 2 at step 4, collective 9, c"
    assert difference_text(sides).startswith(f"the ranks are not at the same collective ({stands}): one was skipped")


def test_the_heartbeat_of_rank_0_names_it() -> None:
    """From what the others publish once they have waited for more than a beat, and its own."""
    now, store = [100.0], dist.HashStore()
    limits = {"timeout_seconds": 60, "stall_seconds": 600, "stacks": None, "clock": lambda: now[0]}
    first, second = (Heartbeat(store, rank, 2, **limits) for rank in range(2))
    first.recent, second.recent = [(8, 3, "b")], [(8, 3, "c")]
    second.set_status(3, "c")
    second.write(second.beat())
    assert first.read() is None, "it may be about to end its wait"
    now[0] += 1.5
    second.write(second.beat())
    fault = first.read()
    assert fault is not None and fault.exit_code == NumericsError.exit_code
    assert "rank 0 at step 3, collective 8, b; rank 1 at step 3, collective 8, c" in fault.text
    assert second.read() == fault


def test_a_rank_that_works_publishes_nothing() -> None:
    now = [100.0]
    beating = Heartbeat(dist.HashStore(), 1, 2, timeout_seconds=60, stall_seconds=600, stacks=None, clock=lambda: now[0])
    beating.recent = [(number, 3, "b") for number in range(RECENT)]
    beating.set_status(3, "its own work", waiting=False)
    now[0] += 50
    assert beating.beat().recent == ()
    beating.set_status(3, "b")
    now[0] += 50
    assert len(beating.beat().recent) == RECENT
    assert Seen(Beat(0, 3, "b", True, 0.0), 0.0).beat.recent == ()
