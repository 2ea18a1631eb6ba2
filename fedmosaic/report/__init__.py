"""What people see: tables, progress."""
