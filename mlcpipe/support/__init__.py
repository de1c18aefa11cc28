"""What every room uses: settings, progress, and files, which are untrusted when read and atomic when written."""
