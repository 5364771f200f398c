// AI SDK, over chats, Responses and Messages: a streamed tool loop, typed output, pictures, a prompt that is too long.
// `node ai_sdk.mjs URL MODEL TEXTS`, in a folder with its packages, prints what came of each check as checks.py does.

import assert from 'node:assert/strict'

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [url, name, texts] = process.argv.slice(2)
const { LOOP, PICTURE, PICTURE_URL, TYPED, END } = JSON.parse(texts)
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const models = {
  compatible: createOpenAICompatible({ name: 'baton', baseURL: `${url}/v1`, supportsStructuredOutputs: true })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })(name),
}
const verdict = Output.object({ schema: z.object({ answer: z.string(), certain: z.boolean() }) })
const tools = {
  run: tool({ description: 'Run a command.', inputSchema: z.object({ command: z.string() }), execute: () => 'baton-42' }),
}
const look = tool({
  description: 'Look at a picture.',
  inputSchema: z.object({ path: z.string() }),
  execute: () => 'seen',
  toModelOutput: () => ({
    type: 'content',
    value: [{ type: 'image-data', data: PICTURE_URL.split(',')[1], mediaType: 'image/png' }],
  }),
})
// Baton keeps no response, so that a step can't refer to one.
const fixed = { maxRetries: 0, stopWhen: stepCountIs(4), providerOptions: { openai: { store: false } } }

const checks = {
  async tool_loop(model) {
    const streamed = streamText({ ...fixed, model, tools, prompt: LOOP, onError() {} })
    assert.equal(await streamed.text, END.loop)
    const whole = await generateText({ ...fixed, model, tools, prompt: LOOP })
    assert.equal(whole.text, END.loop)
    const messages = [{ role: 'user', content: LOOP }, ...whole.response.messages, { role: 'user', content: 'And now?' }]
    assert.equal((await generateText({ ...fixed, model, tools, messages })).text, END.loop)
  },
  async picture_in_a_result(model) {
    assert.equal((await generateText({ ...fixed, model, tools: { look }, prompt: PICTURE })).text, END.picture)
  },
  async typed_output(model) {
    for (const more of [{}, { tools }]) {
      const streamed = streamText({ ...fixed, ...more, model, prompt: TYPED, output: verdict, onError() {} })
      assert.deepEqual(await streamed.output, JSON.parse(END.typed))
      const whole = await generateText({ ...fixed, ...more, model, prompt: TYPED, output: verdict })
      assert.deepEqual(whole.output, JSON.parse(END.typed))
    }
  },
  async prompt_beyond_the_context(model) {
    await assert.rejects(generateText({ ...fixed, model, prompt: 'Tell of batons. '.repeat(12_000) }), /maximum/)
  },
}

for (const [check, run] of Object.entries(checks)) {
  for (const [api, model] of Object.entries(models)) {
    if (check === 'picture_in_a_result' && ['compatible', 'chat'].includes(api)) continue // it sends them as text
    const result = { name: `${check}_over_${api}`, outcome: 'passed' }
    await run(model).catch((error) => Object.assign(result, { outcome: 'failed', reason: `${error}` }))
    console.log(JSON.stringify(result))
  }
}
