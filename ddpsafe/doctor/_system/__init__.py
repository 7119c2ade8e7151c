"""What is asked of the driver, of torch and of the kernel.

Each module imports only those before it::

    nvidia               the driver's view of the GPUs
    tcp                  connections, neighbours and addresses of other hosts
    torch_probe_program  run in a process of its own: what torch says
    torch_probe          starts that process, and ends it in time
"""
