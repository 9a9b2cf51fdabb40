"""Drives gVisor's own Python sandboxes for the benchmark: one JSON request a line in, one JSON answer a line out."""

import json
import os
import time

import gvisor

kept = []


def answer(**fields):
    print(json.dumps(fields), flush=True)


def milliseconds_since(begun):
    return (time.perf_counter() - begun) * 1000


def main():
    # The package lets its sandboxes have this process's standard input, which would take the requests away.
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer(ready=True)
    for line in requests:
        request = json.loads(line)
        op = request["op"]
        try:
            if op == "create":
                begun = time.perf_counter()
                sandbox = gvisor.Sandbox()
                answer(ms=milliseconds_since(begun))
                # Not timed, but waited for, so that it disturbs nothing that comes after it.
                sandbox.close()
                answer(closed=True)
            elif op == "create_to_output":
                begun = time.perf_counter()
                sandbox = gvisor.Sandbox()
                sandbox.exec(*request["argv"])
                answer(ms=milliseconds_since(begun))
                sandbox.close()
                answer(closed=True)
            elif op == "keep":
                for _ in range(request["count"]):
                    kept.append(gvisor.Sandbox())
                answer(dirs=[sandbox.bundle_dir for sandbox in kept])
            elif op == "exec":
                begun = time.perf_counter()
                stdout, _ = kept[0].exec(*request["argv"])
                answer(ms=milliseconds_since(begun), bytes=len(stdout))
            elif op == "close":
                while kept:
                    kept.pop().close()
                answer(closed=True)
            else:
                answer(error=f"unknown op {op!r}")
        except (gvisor.Error, OSError) as error:
            answer(error=str(error))
    while kept:
        kept.pop().close()


main()
