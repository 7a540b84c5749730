// rendezvous/http_request.h: a reply of the rendezvous server.
#include "fuzz.h"
#include "rendezvous/http_request.h"

namespace dad::fuzz {
namespace {

void Run(ByteSpan input) {
  const std::string bytes(reinterpret_cast<const char*>(input.data()), input.size());
  const Result<HttpReply> reply = ParseHttpReply(bytes);
  if (!reply.ok()) return;
  const std::string& body = reply.value().body;
  Require(body.size() + 4 <= bytes.size(), "a body larger than the reply");
  Require(bytes.find("\r\n\r\n" + body) != std::string::npos, "a body that is not in the reply");
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const char* text : {
           "HTTP/1.0 200 OK\r\nServer: x\r\nContent-Length: 5\r\n\r\nhello",
           "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
           "HTTP/1.0 200 OK\r\n\r\nno length",
           "HTTP/1.0 200\r\nContent-Length:    3\r\nX: y\r\n\r\nabcdef",
           "HTTP/1.0 200 OK\r\nContent-Length: -1\r\n\r\n",
       }) {
    seeds.push_back(Seed().Text(text).bytes());
  }
  return seeds;
}

const Register registered({"http_reply", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
