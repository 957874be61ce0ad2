"""What a gateway is put together from.

knowledge   router, watcher and what they need: of every process
data        what clients speak to: of a whole gateway, and of each data process
control     keys, leases, admin API: of a whole gateway, and of a supervisor
"""
