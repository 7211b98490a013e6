"""Plans a pipeline before there is one: memory of each device, the microbatch that fits, time.

`python -m groupwise.planner --help` lists the options. Bytes and operations are those of the pipeline's own
stages and clipping engine, run on tensors that are never allocated; a schedule is then simulated task by task.
"""
