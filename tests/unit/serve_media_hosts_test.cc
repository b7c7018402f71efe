// Which addresses are public, and how hosts are spelled.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include "parvl/serve/media_fetch.h"
#include "parvl/serve/public_address.h"

namespace parvl {
namespace {

using testing::HasSubstr;

bool is_public(const std::string& text) {
  sockaddr_storage storage = {};
  if (text.find(':') == std::string::npos) {
    auto& in = reinterpret_cast<sockaddr_in&>(storage);
    in.sin_family = AF_INET;
    EXPECT_EQ(::inet_pton(AF_INET, text.c_str(), &in.sin_addr), 1) << text;
  } else {
    auto& in6 = reinterpret_cast<sockaddr_in6&>(storage);
    in6.sin6_family = AF_INET6;
    EXPECT_EQ(::inet_pton(AF_INET6, text.c_str(), &in6.sin6_addr), 1) << text;
  }
  return is_public_address(reinterpret_cast<sockaddr&>(storage));
}

TEST(PublicAddress, Table) {
  for (const char* text :
       {"1.0.0.0",         "1.1.1.1",         "8.8.8.8",         "9.255.255.255",   "11.0.0.0",
        "100.63.255.255",  "100.128.0.0",     "126.255.255.255", "128.0.0.0",       "168.63.129.15",
        "168.63.129.17",   "169.253.255.255", "169.255.0.0",     "172.15.255.255",  "172.32.0.0",
        "192.0.1.0",       "192.0.3.0",       "192.167.255.255", "192.169.0.0",     "198.17.255.255",
        "198.20.0.0",      "223.255.255.255", "2000::",          "2001:200::1",     "2001:4860:4860::8888",
        "2001:db7:ffff::", "2001:db9::",      "2003::",          "2606:4700::1111", "3ffe:ffff::",
        "3fff:1000::",     "3fff:ffff::"}) {
    EXPECT_TRUE(is_public(text)) << text;
  }
  for (const char* text : {"0.0.0.0",
                           "0.255.255.255",
                           "10.0.0.0",
                           "10.255.255.255",
                           "100.64.0.0",
                           "100.127.255.255",
                           "100.100.100.200",
                           "127.0.0.1",
                           "127.255.255.255",
                           "168.63.129.16",
                           "169.254.0.0",
                           "169.254.169.254",
                           "169.254.255.255",
                           "172.16.0.0",
                           "172.31.255.255",
                           "192.0.0.192",
                           "192.0.2.1",
                           "192.88.99.1",
                           "192.168.0.0",
                           "192.168.255.255",
                           "198.18.0.0",
                           "198.19.255.255",
                           "198.51.100.1",
                           "203.0.113.1",
                           "224.0.0.1",
                           "239.255.255.255",
                           "240.0.0.0",
                           "255.255.255.255",
                           "::",
                           "::1",
                           "::8.8.8.8",
                           "::ffff:127.0.0.1",
                           "::ffff:8.8.8.8",
                           "64:ff9b::8.8.8.8",
                           "64:ff9b:1::1",
                           "100::1",
                           "1fff:ffff::",
                           "2001::1",
                           "2001:1ff:ffff::",
                           "2001:db8::1",
                           "2002:7f00:1::",
                           "3fff::1",
                           "3fff:fff::",
                           "4000::",
                           "fc00::1",
                           "fd00:ec2::254",
                           "fdff:ffff::",
                           "fe80::1",
                           "febf::1",
                           "fec0::1",
                           "ff02::1",
                           "ffff::"}) {
    EXPECT_FALSE(is_public(text)) << text;
  }
  sockaddr local = {};
  local.sa_family = AF_UNIX;
  EXPECT_FALSE(is_public_address(local));
}

TEST(MediaHosts, OneSpelling) {
  const auto hosts = parse_media_hosts("--flag", {"A.Test, b.test.", "[::0:1]", "127.0.0.1", "FD00:0::1,x_y-z"});
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  EXPECT_THAT(*hosts, testing::ElementsAre("a.test", "b.test", "::1", "127.0.0.1", "fd00::1", "x_y-z"));
  EXPECT_TRUE(parse_media_hosts("--flag", {})->empty());
  for (const char* value : {"", "a.test,", "http://a.test", "a.test/", "a.test:80", "*.test", "a b", "[::1]:80", "."}) {
    const absl::Status status = parse_media_hosts("--flag", {value}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << value;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--flag takes host names")) << value;
  }
}

}  // namespace
}  // namespace parvl
