"""What writers and readers of weights say to each other, and when: values and state machines, no
sockets.
"""
