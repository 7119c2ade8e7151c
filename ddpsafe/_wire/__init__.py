"""What crosses between launcher and worker: plain, frozen, picklable, free of torch."""
