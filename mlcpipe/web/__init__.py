"""The chat page as a static site: the page built from `apps/chat-web`, and bundles for webgpu."""

from mlcpipe.web.page import page_folder
from mlcpipe.web.server import SiteServer
from mlcpipe.web.site import Site, assemble_site, check_bundles, write_site

__all__ = ["Site", "SiteServer", "assemble_site", "check_bundles", "page_folder", "write_site"]
