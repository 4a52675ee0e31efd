// Starts fauxqs (its dist/app.js is argument 1) at its best and on loopback only: its own dist/server.js writes a log
// line a request, which costs it about 10 us, and listens on every interface.
import net from "node:net";
import { pathToFileURL } from "node:url";

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (options, ...rest) {
  const place = options && typeof options === "object" ? { ...options, host: "127.0.0.1" } : options;
  return listen.call(this, place, ...rest);
};
const { startFauxqs } = await import(pathToFileURL(process.argv[2]).href);
await startFauxqs({ logger: false });
