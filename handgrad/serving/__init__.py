"""Serves a loaded model over HTTP: OpenAI's API, and a page to talk to the model or let it write.

`requests` parses a request and generates its text, `server` receives requests and sends answers.
Start at `server`.
"""
