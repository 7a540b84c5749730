// A small HTTP/1.0 key-value server with the manners of horovodrun's: two path parts or
// 400, 404 for a missing key, one request per connection.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>

namespace dad {

class KeyValueServer {
 public:
  KeyValueServer() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    bind(listener_, reinterpret_cast<sockaddr*>(&address), length);
    listen(listener_, 64);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~KeyValueServer() {
    shutdown(listener_, SHUT_RDWR);  // wakes accept
    thread_.join();
    close(listener_);
  }

  int port() const { return port_; }
  // The next requests are dropped without an answer.
  void FailNext(int requests) { failures_ = requests; }

 private:
  void Run() {
    for (;;) {
      const int fd = accept(listener_, nullptr, nullptr);
      if (fd < 0) return;
      const std::string request = Receive(fd);
      if (failures_ > 0) {
        --failures_;
      } else {
        const std::string reply = Answer(request);
        for (size_t at = 0; at < reply.size();) {
          const ssize_t sent = send(fd, reply.data() + at, reply.size() - at, MSG_NOSIGNAL);
          if (sent <= 0) break;
          at += static_cast<size_t>(sent);
        }
      }
      close(fd);
    }
  }

  static std::string Receive(int fd) {
    std::string bytes;
    char chunk[4096];
    for (;;) {
      if (const size_t end = bytes.find("\r\n\r\n"); end != std::string::npos) {
        const size_t at = bytes.find("Content-Length: ");
        const size_t body = at < end ? std::stoul(bytes.substr(at + 16)) : 0;
        if (bytes.size() >= end + 4 + body) return bytes;
      }
      const ssize_t got = recv(fd, chunk, sizeof chunk, 0);
      if (got <= 0) return bytes;
      bytes.append(chunk, static_cast<size_t>(got));
    }
  }

  std::string Answer(const std::string& request) {
    const size_t space = request.find(' ');
    const std::string verb = request.substr(0, space);
    const std::string path = request.substr(space + 1, request.find(' ', space + 1) - space - 1);
    if (std::count(path.begin(), path.end(), '/') != 2) return Reply("400 Bad Request", "");
    if (verb == "PUT") values_[path] = request.substr(request.find("\r\n\r\n") + 4);
    if (verb == "DELETE") values_.erase(path);
    if (verb != "GET") return Reply("200 OK", "");
    const auto found = values_.find(path);
    return found == values_.end() ? Reply("404 Not Found", "") : Reply("200 OK", found->second);
  }

  static std::string Reply(const std::string& status, const std::string& body) {
    return "HTTP/1.0 " + status + "\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
  }

  const int listener_;
  int port_ = 0;
  std::atomic<int> failures_{0};
  std::map<std::string, std::string> values_;
  std::thread thread_;
};

}  // namespace dad
