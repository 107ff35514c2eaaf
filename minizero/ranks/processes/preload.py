"""What the fork server imports, once, before ranks are forked from it.

It touches no GPU: CUDA does not survive a fork. The server comes into a session of its
own, lest the terminal interrupt it, or a rank that has only just been forked. Until
here its parent had the interrupt blocked for it.
"""

import gc
import multiprocessing
import os
import signal
import sys

if multiprocessing.parent_process() is None and sys.argv[0] == "-c":
    os.environ.pop("PYTHONSAFEPATH", None)
    os.setsid()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)

    import cloudpickle  # noqa: F401
    import torch  # noqa: F401

    import minizero.ranks.processes.worker  # noqa: F401

    if torch.version.cuda is None:  # nor may what it imports ask for a GPU
        # a rank's first optimizer would, which takes each of them a second
        import torch._dynamo  # noqa: F401

    gc.freeze()  # a collection in a rank would write to, and so copy, these pages
