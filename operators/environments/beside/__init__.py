"""Programs that another interpreter runs: each imports the package of its system and nothing of
this project.
"""
