"""What the trainer is made of; imported where a worker builds it, because some of it imports
torch.
"""
