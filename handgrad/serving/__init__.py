"""A loaded model over HTTP: the requests of OpenAI's API, and a page to talk to the model or let it write.

`requests` reads what a client asks for and writes it, `server` takes requests and brings answers on their way.
Start at `server`.
"""
