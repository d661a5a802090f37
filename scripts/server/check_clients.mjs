// Talks to a running `medusa serve` through two JavaScript clients: Vercel's AI SDK, which reads answers and streams with code of its own,
// and OpenAI's package for Node. On Node 20 or newer, in a folder with them:
//
//     npm install ai@5 @ai-sdk/openai-compatible@1 openai@6
//     node check_clients.mjs http://127.0.0.1:8000 [KEY]      # a copy of this file, so that node finds the packages beside it
//
// A line per check; ends with 1 if one of them failed.
import assert from "node:assert/strict";
import process from "node:process";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, apiKey = "none"] = process.argv.slice(2);
assert(url, "usage: node check_clients.mjs http://127.0.0.1:PORT [KEY]");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const name = (await openai.models.list()).data[0].id;
const provider = createOpenAICompatible({ name: "medusa", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const asked = { model: provider(name), prompt: "How do I make omelette for 4 people?", temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const question = { model: name, messages: [{ role: "user", content: asked.prompt }], temperature: 0, max_tokens: 64 };

async function joined(pieces) {
  let text = "";
  for await (const piece of pieces) text += piece;
  return text;
}

const checks = {
  async "AI SDK: an answer, and the same streamed"() {
    const whole = await generateText(asked);
    assert(whole.text.length > 0 && ["stop", "length"].includes(whole.finishReason), whole.finishReason);
    assert.equal(whole.usage.totalTokens, whole.usage.inputTokens + whole.usage.outputTokens);
    const stream = streamText(asked);
    assert.equal(await joined(stream.textStream), whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.equal(await stream.finishReason, whole.finishReason);
  },
  async "AI SDK: a completion, and the same streamed"() {
    const completion = { ...asked, model: provider.completionModel(name), prompt: "The old horse" };
    const whole = await generateText(completion);
    assert.equal(await joined(streamText(completion).textStream), whole.text);
  },
  async "AI SDK: seeds and stop sequences"() {
    const drawn = { ...asked, temperature: 1, seed: 7 };
    const { text } = await generateText(drawn);
    assert.equal((await generateText(drawn)).text, text);
    const stop = text.slice(text.length / 2, text.length / 2 + 4);
    assert.equal((await generateText({ ...drawn, stopSequences: [stop] })).text, text.slice(0, text.indexOf(stop)));
  },
  async "AI SDK: tools are taken, or the error says that the template has none"() {
    const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } } });
    const tools = { weather: tool({ description: "The weather", inputSchema }) };
    try {
      assert((await generateText({ ...asked, tools })).text.length > 0);
    } catch (error) {
      assert(APICallError.isInstance(error) && error.statusCode === 400 && /tools.*template|template.*tools/.test(error.message), error.message);
    }
  },
  async "AI SDK: an error's message arrives"() {
    const wrong = generateText({ ...asked, model: provider("nobody") });
    await assert.rejects(wrong, (error) => APICallError.isInstance(error) && error.statusCode === 404 && error.message.includes("nobody"));
  },
  async "AI SDK: an abandoned stream ends"() {
    const abort = new AbortController();
    const stream = streamText({ ...asked, maxOutputTokens: 400, temperature: 1.9, abortSignal: abort.signal, onError() {} });
    for await (const part of stream.fullStream) if (part.type === "text-delta") abort.abort();
  },
  async "openai: an answer, and the same streamed"() {
    const whole = await openai.chat.completions.create(question);
    const stream = await openai.chat.completions.create({ ...question, stream: true });
    const pieces = (async function* () {
      for await (const chunk of stream) yield chunk.choices[0]?.delta.content ?? "";
    })();
    assert.equal(await joined(pieces), whole.choices[0].message.content);
  },
  async "openai: its helper for streams puts several choices together"() {
    const drawn = { ...question, n: 2, temperature: 1, seed: 3 };
    const whole = await openai.chat.completions.create(drawn);
    const final = await openai.chat.completions.stream(drawn).finalChatCompletion();
    assert.deepEqual(final.choices.map((c) => c.message.content), whole.choices.map((c) => c.message.content));
  },
  async "openai: errors have their class and code"() {
    await assert.rejects(openai.chat.completions.create({ ...question, model: "nobody" }), { status: 404, code: "model_not_found" });
    await assert.rejects(openai.chat.completions.create({ ...question, temperature: 3 }), { status: 400, param: "temperature" });
  },
};

let failed = 0;
for (const [what, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok    ${what}`);
  } catch (error) {
    failed += 1;
    console.log(`wrong ${what}: ${error.message}`);
  }
}
console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
