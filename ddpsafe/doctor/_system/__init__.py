"""Facts from the GPU driver, the kernel and torch.

Each module imports only those before it::

    nvidia               the driver's view of the GPUs
    infiniband           the ports of InfiniBand and RoCE devices
    tcp                  connections, neighbours and addresses of other hosts
    torch_probe_program  reports on torch and the GPUs, in a process of its own
    torch_probe          starts that process, and ends it in time
"""
