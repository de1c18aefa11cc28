/**
 * Markdown of a model as HTML that can do no harm.
 *
 * A model's text is hostile: it may repeat a prepared web page. So nothing that loads (images,
 * frames, styles), nothing that runs, nothing that looks like a part of the page (forms, ids), and links only to
 * where a click is a decision.
 */

import DOMPurify from "dompurify";
import { Marked } from "marked";

const TAGS =
  "p br hr h1 h2 h3 h4 h5 h6 strong em del s code pre blockquote ul ol li a table thead tbody tr th td sup sub input".split(" ");
const ATTRIBUTES = ["href", "class", "align", "start", "type", "checked", "disabled"];
/** Beyond this, parsing at every token would hold up the page; a model's answer is a few thousand characters. */
const MAX_CHARACTERS = 200_000;

const marked = new Marked({ gfm: true, breaks: true, async: false });
// HTML in Markdown is shown as the text that it is.
marked.use({ renderer: { html: ({ text }) => escape(text) } });

const purify = DOMPurify(window);
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    const href = node.getAttribute("href") ?? "";
    if (/^(https?:|mailto:)/i.test(href)) {
      node.setAttribute("rel", "noopener noreferrer nofollow");
      node.setAttribute("target", "_blank");
      node.setAttribute("title", href);
    } else node.removeAttribute("href");
  }
  // Check boxes of task lists, and no other input.
  if (node.tagName === "INPUT" && (node.getAttribute("type") !== "checkbox" || !node.hasAttribute("disabled"))) node.remove();
  const language = /^language-[\w+#.-]{1,30}$/;
  if (node.hasAttribute("class") && !(node.tagName === "CODE" && language.test(node.className))) node.removeAttribute("class");
});

export function renderMarkdown(text: string): string {
  if (text.length > MAX_CHARACTERS) return `<pre>${escape(text)}</pre>`;
  return purify.sanitize(marked.parse(text) as string, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
  });
}

function escape(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}
