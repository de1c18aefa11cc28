/** Colours for code, by highlight.js with the languages that answers are full of; a chunk of its own, loaded when first needed. */

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const LANGUAGES = { bash, cpp, css, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);
// Sessions in a shell are close enough to scripts, C to C++.
hljs.registerAliases(["shell", "console"], { languageName: "bash" });

/** Beyond this, colouring would hold up the page. */
const MAX_CHARACTERS = 30_000;

/** The code as HTML, its own text escaped; null for a language that is not known. */
export function highlight(code: string, language: string): string | null {
  if (code.length > MAX_CHARACTERS || !hljs.getLanguage(language)) return null;
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}
