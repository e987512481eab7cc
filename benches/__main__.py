# SPDX-License-Identifier: Apache-2.0
"""``make bench``: prints each ratio with what it was measured from."""

from __future__ import annotations

import argparse

from benches import accuracy, overhead, parse_time, poller, search, throughput

BENCHES = {
    "accuracy": accuracy.measure,
    "throughput": throughput.measure,
    "search": search.measure,
    "parse": parse_time.measure,
    "overhead": overhead.measure,
    "poller": poller.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help="which to run; all when none is named")
    for name in parser.parse_args().names or list(BENCHES):
        print(f"== {name}", flush=True)
        BENCHES[name]()


if __name__ == "__main__":
    main()
