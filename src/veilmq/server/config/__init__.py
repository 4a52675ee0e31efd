"""What an operator gives a server: settings, and files of queues to declare.

Strategy: everything is checked when it is read, and an error names the file and the line or the setting.
"""
