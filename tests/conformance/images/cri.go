package main

import "fmt"

// What the validation suite of CRI (critest) asks for besides: tests/cri/images.txt names them.
func init() {
	for name, user := range map[string]string{
		"test-image-user-uid":            "1002",
		"test-image-user-username":       "www-data",
		"test-image-user-uid-group":      "1003:1004",
		"test-image-user-username-group": "www-data:1004",
	} {
		recipes[name] = withLayer("", nil, &image{cmd: []string{"sh"}, user: user})
	}
	recipes["test-image-predefined-group"] = withLayer("predefined-group", func(l *layer) {
		l.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\ndefault-user:x:1000:1000::/:/bin/sh\n")
		l.text("/etc/group", "root:x:0:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n")
	}, &image{cmd: []string{"sh"}, user: "1000"})
	for _, name := range []string{"test-image-1", "test-image-2", "test-image-3", "test-image-latest", "test-image-tag", "test-image-tags"} {
		recipes[name] = withLayer(name, func(l *layer) { l.text("/"+name, name+"\n") }, &image{cmd: []string{"sh"}})
	}
	recipes["httpd"] = webServer("httpd", 80)
	recipes["hostnet-nginx-amd64"] = webServer("hostnet-nginx", 12003)
}

// webServer is busybox' own; it logs its name as Apache does.
func webServer(name string, port int) func(*kitchen) (*image, error) {
	page := "<!DOCTYPE html><title>" + name + "</title><h1>It works!</h1>\n"
	command := fmt.Sprintf("echo %s; exec busybox httpd -f -p %d -h /srv", name, port)
	return withLayer(name, func(l *layer) { l.text("/srv/index.html", page) }, &image{cmd: []string{"sh", "-c", command}})
}
