"""Plans a pipeline before it runs: memory of each device, the microbatch that fits, and time.

`python -m groupwise.planner --help` lists the options. Bytes and operations are counted
with the pipeline's own stages and clipping engine, on tensors that are not allocated. Times are computed from the
published speeds of devices.
"""
