"""The health of a run: liveness of the ranks, waits between them, and the end of every rank when one fails, dies or stalls.

One control plane, separate from the connections that carry training: each rank has a `Link` (links.py) to a few neighbours,
and its watchdog thread (watchdog.py) floods short messages over them. After start-up nothing here uses torch's store, whose
calls have no deadline when the process that serves it is frozen. What a worker starts first (watchdog.py, links.py, status.py)
imports no torch.

Messages are JSON objects, one per line; `from` and `id` make a message unique, and every rank forwards those that it has not
seen yet. Kinds:

- `who`: rank, process and host, once, at the start.
- `failed`: the end of the run: its `failure`, with a text for the user and the ranks that it blames.
- `call`: request by a rank without progress for the state of all ranks; `here`: an answer.
- `folder`: the folder of the run's files.
- `value`: this rank's value under a key, for `Watchdog.gather`.
- `bye`: this rank has finished its part; its connection may close.
"""
