// Plain JavaScript agents on the providers' own clients, with no guard in them. `node agent.mjs CLIENT STREAM MODULES`.
// Each works until the model calls no tool, at most 40 turns, and prints the number of turns and the last text.
import { createRequire } from "node:module";
const [client, streamed, modules] = process.argv.slice(2);
const stream = streamed === "stream", require = createRequire(modules + "/");
const failed = JSON.stringify({ status: "partial_parse_error", data: null });
const schema = { type: "object", properties: { page: { type: "number" } } }, name = "parse_document";
const messages = [{ role: "user", content: "Extract the invoice." }], model = "a-model";

async function openai() {
  const api = new (require("openai").OpenAI)({ apiKey: "a-dummy-key", maxRetries: 0 });
  const tools = [{ type: "function", function: { name, parameters: schema } }];
  const asked = { model, messages, tools, max_tokens: 300 };
  const message = stream
    ? await api.chat.completions.stream({ ...asked, stream_options: { include_usage: true } }).finalMessage()
    : (await api.chat.completions.create(asked)).choices[0].message;
  messages.push(message);
  for (const call of message.tool_calls ?? []) messages.push({ role: "tool", tool_call_id: call.id, content: failed });
  return message.tool_calls?.length ? null : message.content;
}

async function anthropic() {
  const api = new (require("@anthropic-ai/sdk").Anthropic)({ apiKey: "a-dummy-key", maxRetries: 0 });
  const asked = { model, messages, tools: [{ name, input_schema: schema }], max_tokens: 300 };
  const message = stream ? await api.messages.stream(asked).finalMessage() : await api.messages.create(asked);
  messages.push({ role: "assistant", content: message.content });
  const uses = message.content.filter((block) => block.type === "tool_use");
  if (!uses.length) return message.content[0].text;
  messages.push({ role: "user", content: uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: failed })) });
  return null;
}

async function gemini() {
  const { models } = new (require("@google/genai").GoogleGenAI)({ apiKey: "a-dummy-key" });
  const contents = messages.map((one) => (one.content ? { role: "user", parts: [{ text: one.content }] } : one));
  const config = { maxOutputTokens: 300, tools: [{ functionDeclarations: [{ name, parametersJsonSchema: schema }] }] };
  const parts = [];
  if (stream) {
    for await (const chunk of await models.generateContentStream({ model, contents, config }))
      parts.push(...(chunk.candidates?.[0]?.content?.parts ?? []));
  } else parts.push(...(await models.generateContent({ model, contents, config })).candidates[0].content.parts);
  const calls = parts.filter((part) => part.functionCall);
  if (!calls.length) return parts.map((part) => part.text ?? "").join("");
  const response = JSON.parse(failed);
  messages.push({ role: "model", parts }, { role: "user", parts: calls.map(() => ({ functionResponse: { name, response } })) });
  return null;
}

for (let turn = 1; turn <= 40; turn++) {
  const said = await { openai, anthropic, gemini }[client]();
  if (said !== null) {
    console.log(turn, said.split("\n")[0]);
    process.exit(0);
  }
}
console.log("never ended");
