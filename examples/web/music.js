// Tokens as notes, heard and drawn. What a token is, the server says: `kinds` is {new, rest, held, lowest}.

export function notesOf(tokens, kinds) {
  const notes = [];
  let place = 0;
  let sounding = null;
  for (const token of tokens) {
    if (token === kinds.new) continue; // takes no time
    if (token === kinds.held) {
      if (sounding) sounding.steps++;
    } else {
      sounding = token === kinds.rest ? null : { pitch: token - kinds.held - 1 + kinds.lowest, place, steps: 1 };
      if (sounding) notes.push(sounding);
    }
    place++;
  }
  return { notes, steps: place };
}

// Plays notes as plucked strings, and returns the context, with which they can be stopped.
export function play({ notes }, secondsPerStep) {
  const context = new AudioContext();
  const start = context.currentTime + 0.1;
  for (const { pitch, place, steps } of notes) {
    const [from, to] = [place, place + steps].map((step) => start + step * secondsPerStep);
    const loud = new GainNode(context, { gain: 0 });
    loud.gain.setValueAtTime(0, from);
    loud.gain.linearRampToValueAtTime(0.3, from + 0.01);
    loud.gain.exponentialRampToValueAtTime(0.02, to - 0.02);
    loud.gain.linearRampToValueAtTime(0, to);
    const string = new OscillatorNode(context, { type: "triangle", frequency: 440 * 2 ** ((pitch - 69) / 12) });
    string.connect(loud).connect(context.destination);
    string.start(from);
    string.stop(to);
  }
  return { context, start };
}

// Draws a piano roll with a line below every C. `given` is how many steps were not made; `now` the step that is heard, if any is.
export function draw(canvas, { notes, steps }, { given, now = null, room = steps }) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const colour = (name) => getComputedStyle(canvas).getPropertyValue(`--${name}`);
  const pitches = notes.map(({ pitch }) => pitch);
  const low = Math.min(60, ...pitches) - 1;
  const high = Math.max(72, ...pitches) + 1;
  const [x, y] = [width / Math.max(1, room), height / (high - low + 1)];
  pen.fillStyle = colour("line");
  for (let c = 12 * Math.ceil(low / 12); c <= high; c += 12) pen.fillRect(0, (high - c + 1) * y - 1, width, 1);
  for (const { pitch, place, steps: length } of notes) {
    const heard = now !== null && place <= now && now < place + length;
    pen.fillStyle = colour(heard ? "now" : place < given ? "given" : "made");
    pen.fillRect(place * x, (high - pitch) * y, Math.max(1, length * x - 1), Math.max(2, y - 1));
  }
  pen.fillStyle = colour("faint");
  pen.fillRect(given * x - 1, 0, 1, height);
}
