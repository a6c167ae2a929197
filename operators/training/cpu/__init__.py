"""What makes a step fast on a CPU: attention in blocks, gradients in place, products of bfloat16;
no learner.
"""
