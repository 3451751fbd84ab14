"""What is refused in a configuration: values out of range, fields that contradict one another, secrets."""
