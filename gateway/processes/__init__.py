"""Several processes on one port: a supervisor without clients, and data processes that tell each other what they promised.

`channel` joins each data process to its supervisor, `bus` joins all of them; `shared_router` is what goes over the bus,
`control` what goes over the channels. `supervisor` starts and ends the processes; `supervising` and `data` put together what
runs in it and in them.
"""
