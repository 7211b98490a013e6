"""Plans a pipeline in advance: memory of each device, the microbatch that fits, and time.

`python -m groupwise.planner --help` lists the options. Bytes and operations are those of the pipeline's own
stages and clipping engine, run on tensors that are never allocated; times follow from devices' published speeds.
"""
