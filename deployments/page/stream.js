// One chat completion as a stream of events.

/** An answer of the server, or of the network, in words for the reader. */
export class ChatError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** What went wrong, from a response that is not OK. */
export async function refusal(response) {
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    message = "";  // a proxy's page, not ours
  }
  const wait = response.headers.get("Retry-After");
  if (response.status === 401) message ||= "The API key is missing or wrong.";
  if (response.status === 503 || response.status === 429) {
    message = `The server is busy: ${message || `try again ${wait ? `in ${wait} s` : "later"}`}`;
  }
  return new ChatError(message || `The server answered with status ${response.status}.`, response.status);
}

/** Sends the request; yields each JSON event of the answer until the end. Raises ChatError; an abort passes through. */
export async function* complete(body, headers, signal) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers },
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ChatError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") { ended = true; break; }
      const event = JSON.parse(data);
      if (event.error) throw new ChatError(event.error.message ?? "The server gave up on this answer.");
      yield event;
    }
  } catch (error) {
    if (error instanceof ChatError || error.name === "AbortError") throw error;
    throw new ChatError("The connection broke before the answer was complete.");
  }
  if (!ended) throw new ChatError("The connection ended before the answer was complete.");
}

/** The data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
