// Command coredns stands in for the CoreDNS of the agnhost image: it answers A queries over UDP with the addresses of
// the Corefile's `hosts` block, which is all that the tests' own DNS servers are configured with. Other names do not
// exist.
package main

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

func main() {
	path := flag.String("conf", "Corefile", "the Corefile")
	flag.Parse()
	if err := serve(*path); err != nil {
		fmt.Fprintln(os.Stderr, "coredns:", err)
		os.Exit(1)
	}
}

func serve(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	hosts := hostsOf(string(text))
	listener, err := net.ListenPacket("udp", ":53")
	if err != nil {
		return err
	}
	query := make([]byte, 4096)
	for {
		length, from, err := listener.ReadFrom(query)
		if err != nil {
			return err
		}
		if reply, err := answer(query[:length], hosts); err == nil {
			_, _ = listener.WriteTo(reply, from)
		}
	}
}

// hostsOf reads the lines `ADDRESS NAME…`; all others begin with a word that is no address.
func hostsOf(corefile string) map[string]netip.Addr {
	hosts := map[string]netip.Addr{}
	for _, line := range strings.Split(corefile, "\n") {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		address, err := netip.ParseAddr(words[0])
		if err != nil {
			continue
		}
		for _, name := range words[1:] {
			hosts[strings.ToLower(name)+"."] = address
		}
	}
	return hosts
}

func answer(query []byte, hosts map[string]netip.Addr) ([]byte, error) {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil {
		return nil, err
	}
	question, err := parser.Question()
	if err != nil {
		return nil, err
	}
	address, known := hosts[strings.ToLower(question.Name.String())]
	reply := dnsmessage.Message{
		Header: dnsmessage.Header{ID: header.ID, Response: true, Authoritative: true,
			RecursionDesired: header.RecursionDesired},
		Questions: []dnsmessage.Question{question},
	}
	if !known {
		reply.Header.RCode = dnsmessage.RCodeNameError
	} else if question.Type == dnsmessage.TypeA && address.Is4() {
		reply.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: 30},
			Body:   &dnsmessage.AResource{A: address.As4()},
		}}
	}
	return reply.Pack()
}
