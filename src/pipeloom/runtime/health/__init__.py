"""The health of a run: who is alive, who waits for whom, and how every rank ends when one fails, dies or stalls.

One control plane, apart from the connections that carry training: each rank has a `Link` (links.py) to a few neighbours,
and its watchdog thread (watchdog.py) floods short messages over them. After start-up nothing here uses torch's store, whose
calls have no deadline when the process that serves it is frozen. None of these modules imports torch when it is imported.

Messages are JSON objects, one per line, each with a MAC; `from` and `id` make a message unique, and every rank forwards
what it has not seen yet. Kinds:

- `who`: rank, process and host, once, at the start.
- `failed`: the end of the run: `text` for people, and the ranks that it `blames`.
- `call`: a rank that makes no progress asks all ranks for their state; `here`: an answer.
- `folder`: where the run keeps its files.
- `bye`: this rank has finished its part; its connection may close.
"""
