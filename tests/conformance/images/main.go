// Command images makes the images that the suite asks for and serves them as a registry.
//
// The suite's own programs come from the same Go module as the suite; everything else is a stand-in made of the
// Debian packages that are installed on this machine, under the name that the suite uses. Nothing is downloaded.
//
//	images -programs DIR -drivers DIR -module DIR -list FILE -listen HOST:PORT -netns FILE,… -repos FILE -names NAME,… -certificate FILE
//
// FILE of -list holds the output of `e2e.test --list-images`. The file of -repos is written for the suite's
// KUBE_TEST_REPO_LIST, so that it asks this registry. It serves until it is stopped.
package main

import (
	"bufio"
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"path"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

func main() {
	log.SetFlags(0)
	programs := flag.String("programs", "", "folder of the programs built from the module")
	drivers := flag.String("drivers", "", "folder of a storage driver and its sidecars, for those of their images whose program it has")
	module := flag.String("module", "", "folder of the module k8s.io/kubernetes")
	list := flag.String("list", "", "file with the suite's list of images")
	listen := flag.String("listen", "127.0.0.1:0", "address to serve at")
	netns := flag.String("netns", "", "network namespaces to serve in besides, as files, at the same address")
	repos := flag.String("repos", "", "file to write for KUBE_TEST_REPO_LIST")
	names := flag.String("names", "", "names to serve by TLS as, instead of plain HTTP")
	trust := flag.String("certificate", "", "file to write the certificate of these names to")
	flag.Parse()

	listener, err := net.Listen("tcp", *listen)
	check(err)
	if *names != "" {
		own, err := certificate(strings.Split(*names, ","), *trust)
		check(err)
		listener = tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{own}, NextProtos: []string{"http/1.1"}})
	}
	registry := newRegistry()
	kitchen := &kitchen{programs: *programs, drivers: *drivers, module: *module}
	var without []string
	for _, reference := range readList(*list) {
		name, tag, ok := strings.Cut(reference, ":")
		recipe, known := recipes[path.Base(name)]
		if !ok || !known || strings.HasPrefix(name, "gcr.io/") || strings.HasPrefix(name, "invalid.") {
			without = append(without, reference)
			continue
		}
		image, err := recipe(kitchen)
		if err != nil {
			log.Fatalf("%s: %v", reference, err)
		}
		if image == nil {
			without = append(without, reference)
			continue
		}
		check(registry.add(name, tag, image))
	}
	log.Printf("made %d images; of the suite's list %d have no stand-in: %s", registry.count(), len(without), strings.Join(without, " "))
	for _, namespace := range strings.FieldsFunc(*netns, func(r rune) bool { return r == ',' }) {
		inside, err := listenIn(namespace, listener.Addr().String())
		check(err)
		go func() { check(http.Serve(inside, registry)) }()
	}
	check(os.WriteFile(*repos, []byte(repoList(listener.Addr().String())), 0o644))
	check(http.Serve(listener, registry))
}

// listenIn makes a listener that belongs to another network namespace, by a thread that goes there and does not come back:
// the runtime ends a thread whose goroutine ends while it is locked to it.
func listenIn(namespace, address string) (net.Listener, error) {
	type answer struct {
		listener net.Listener
		err      error
	}
	answers := make(chan answer)
	go func() {
		runtime.LockOSThread()
		listener, err := func() (net.Listener, error) {
			file, err := os.Open(namespace)
			if err != nil {
				return nil, err
			}
			defer file.Close()
			if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
				return nil, fmt.Errorf("%s: %w", namespace, err)
			}
			return net.Listen("tcp", address)
		}()
		answers <- answer{listener, err}
	}()
	made := <-answers
	return made.listener, made.err
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func readList(file string) []string {
	opened, err := os.Open(file)
	check(err)
	defer opened.Close()
	var references []string
	lines := bufio.NewScanner(opened)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if strings.Contains(line, "/") || line == "pause:3.9" {
			references = append(references, line)
		}
	}
	return references
}

// The images keep the whole of their name, behind this registry's address. The one that must not exist and the
// one that needs a password stay where they are.
func repoList(address string) string {
	var text strings.Builder
	for _, entry := range [][2]string{
		{"promoterE2eRegistry", "registry.k8s.io/e2e-test-images"},
		{"buildImageRegistry", "registry.k8s.io/build-image"},
		{"gcEtcdRegistry", "registry.k8s.io"},
		{"gcRegistry", "registry.k8s.io"},
		{"sigStorageRegistry", "registry.k8s.io/sig-storage"},
		{"dockerLibraryRegistry", "docker.io/library"},
		{"cloudProviderGcpRegistry", "registry.k8s.io/cloud-provider-gcp"},
	} {
		fmt.Fprintf(&text, "%s: %s/%s\n", entry[0], address, entry[1])
	}
	return text.String()
}
