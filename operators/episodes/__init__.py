"""Episodes: functions in processes of their own, whose turns come from a generator and become
rollouts.
"""
