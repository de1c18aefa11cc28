// Ollama's own client for JavaScript, unmodified, as its README uses it. argv: a JSON object with what is asked; prints
// what came back as one.
import { Ollama } from 'ollama'

const asked = JSON.parse(process.argv[2])
const { chat: model, embed: embedder, messages, prompt, options, tool, call, schema } = asked
const client = new Ollama({ host: asked.url })

async function all(stream) {
  const parts = []
  for await (const part of await stream) parts.push(part)
  return parts
}

async function refusal(promise) {
  try {
    return await promise
  } catch (error) {
    return { name: error.name, status: error.status_code, error: error.error }
  }
}

async function aborted() {
  const stream = await client.generate({ model, prompt, raw: true, stream: true, options: { ...options, num_predict: 200 } })
  try {
    for await (const _ of stream) stream.abort()
  } catch (error) {
    return error.name
  }
  return 'not aborted'
}

const whole = await client.chat({ model, messages, options: { temperature: 0, num_predict: 8 } })
const streamed = await all(client.chat({ model, messages, stream: true, options: { temperature: 0, num_predict: 8 } }))
const forced = { model, messages, tools: [tool], grammar: call }
const called = await client.chat(forced)
const calls = [called, ...(await all(client.chat({ ...forced, stream: true })))]
const history = [...messages, called.message, { role: 'tool', tool_name: tool.function.name, content: '4 C' }]
const report = {
  generated: (await client.generate({ model, prompt, raw: true, options })).response,
  whole: whole.message.content,
  streamed: streamed.map(part => part.message.content).join(''),
  done: streamed.map(part => part.done),
  counts: [whole, streamed.at(-1)].map(one => [one.prompt_eval_count, one.eval_count, one.done_reason]),
  calls: calls.flatMap(one => one.message.tool_calls ?? []).map(one => one.function),
  after: (await client.chat({ model, messages: history, tools: [tool], options: { num_predict: 1 } })).done,
  formed: (await client.chat({ model, messages, format: schema, options: { temperature: 0 } })).message.content,
  vectors: (await client.embed({ model: embedder, input: asked.texts })).embeddings,
  vector: (await client.embeddings({ model: embedder, prompt: asked.texts[0] })).embedding,
  listed: (await client.list()).models.map(one => one.name),
  running: (await client.ps()).models.map(one => one.name),
  shown: (await client.show({ model })).capabilities,
  pulled: (await all(client.pull({ model, stream: true }))).at(-1).status,
  copied: (await client.copy({ source: model, destination: 'js' })).status,
  deleted: (await client.delete({ model: 'js' })).status,
  version: (await client.version()).version,
  aborted: await aborted(),
  missing: await refusal(client.chat({ model: 'other', messages })),
  refused: await refusal(client.chat({ model, messages, options: { tfs_z: 0.5 } })),
}
console.log(JSON.stringify(report))
