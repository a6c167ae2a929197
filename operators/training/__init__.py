"""What the trainer is made of; its modules are imported on the worker alone, and some of them import torch."""
