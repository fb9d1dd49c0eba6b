"""Who writes what and who reads what, as values: pure, torch-free, nothing here touches a store."""
