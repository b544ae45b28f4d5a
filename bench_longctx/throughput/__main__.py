"""`python -m bench_longctx.throughput` is `bench_longctx.throughput.run`."""

from bench_longctx.throughput.run import main

if __name__ == "__main__":
    raise SystemExit(main())
