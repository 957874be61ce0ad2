// The official SDK for JavaScript.
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "Say a few words." }];

async function errorOf(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.param, Boolean(error.requestID)];
  }
  throw new Error("no error");
}

async function stream(options) {
  let text = "";
  let usage = null;
  const finish = [];
  for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1, stream: true, ...options })) {
    usage = chunk.usage?.completion_tokens ?? usage;
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? "";
      if (choice.finish_reason) finish.push(choice.finish_reason);
    }
  }
  return { text, finish, usage };
}

const models = [];
for await (const each of await client.models.list()) models.push(each.id);
const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1 });
const { response } = await client.chat.completions.create({ model, messages, max_tokens: 1 }).withResponse();
const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 4 });
console.log(
  JSON.stringify({
    models,
    model: (await client.models.retrieve(model)).id,
    text: whole.choices[0].message.content,
    finish: whole.choices[0].finish_reason,
    usage: whole.usage.completion_tokens,
    cached: whole.usage.prompt_tokens_details.cached_tokens,
    request_id: response.headers.get("x-request-id"),
    completion: Boolean(completion.choices[0].text),
    stream: await stream({}),
    stream_with_usage: await stream({ stream_options: { include_usage: true } }),
    concurrently: (
      await Promise.all([...Array(8).keys()].map((seed) => client.chat.completions.create({ model, messages, max_tokens: 4, seed })))
    ).length,
    no_model: await errorOf(() => client.chat.completions.create({ model: "no/such", messages })),
    bad_value: await errorOf(() => client.chat.completions.create({ model, messages, temperature: 9, max_tokens: 1 })),
    bad_key: await errorOf(() => new OpenAI({ apiKey: "wp-no-key", maxRetries: 0 }).models.list()),
  }),
);
