"""Looking at runs from their folders, finished or under way: listed, as tables, exported, reported,
compared.
"""
