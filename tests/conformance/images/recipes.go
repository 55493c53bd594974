package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// kitchen holds what recipes share: where programs are, and layers that several images have.
type kitchen struct {
	programs, module string
	// A storage driver and its sidecars; somebody else has built them.
	drivers string
	made    map[string][]byte
}

// recipes by the last part of an image's name.
var recipes = map[string]func(*kitchen) (*image, error){
	"agnhost":                   agnhost("pause"),
	"busybox":                   busybox,
	"csi-attacher":              sidecar("csi-attacher"),
	"csi-node-driver-registrar": sidecar("csi-node-driver-registrar"),
	"csi-provisioner":           sidecar("csi-provisioner"),
	"csi-resizer":               sidecar("csi-resizer"),
	"csi-snapshotter":           sidecar("csi-snapshotter"),
	"distroless-iptables":       withLayer("iptables", iptables, &image{cmd: []string{"sh"}}),
	"etcd":                      withLayer("etcd", etcd, &image{}),
	"glibc-dns-testing":         withLayer("tools", tools, &image{cmd: []string{"bash"}}),
	"hostpathplugin":            sidecar("hostpathplugin", "mount", "umount", "losetup", "fallocate", "findmnt", "tar", "gzip", "cp", "dd"),
	"ipc-utils":                 withLayer("tools", tools, &image{cmd: []string{"sh"}}),
	"kitten":                    picture("kitten"),
	"livenessprobe":             sidecar("livenessprobe"),
	"nautilus":                  picture("nautilus"),
	"nginx":                     withLayer("nginx", nginx, &image{cmd: []string{"nginx", "-g", "daemon off;"}}),
	"nonewprivs":                nonewprivs,
	"nonroot":                   withLayer("", nil, &image{cmd: []string{"sh"}, user: "1234"}),
	"pause":                     pause,
	"perl":                      withLayer("perl", func(l *layer) { l.debian("perl-base").program("/usr/bin/perl") }, &image{cmd: []string{"perl"}}),
	"regression-issue-74839":    oneProgram("regression-issue-74839"),
	"sample-apiserver":          oneProgram("sample-apiserver"),
	"snapshot-controller":       sidecar("snapshot-controller"),
}

func (k *kitchen) layer(name string, fill func(*layer)) ([]byte, error) {
	if k.made == nil {
		k.made = map[string][]byte{}
	}
	if made, there := k.made[name]; there {
		return made, nil
	}
	gathered := newLayer()
	fill(gathered)
	bytes, err := gathered.tar()
	k.made[name] = bytes
	return bytes, err
}

// stack returns the image with the base layer and the named ones.
func (k *kitchen) stack(made image, layers ...func() ([]byte, error)) (*image, error) {
	made.layers = nil
	for _, next := range append([]func() ([]byte, error){func() ([]byte, error) { return k.layer("base", base) }}, layers...) {
		bytes, err := next()
		if err != nil {
			return nil, err
		}
		made.layers = append(made.layers, bytes)
	}
	return &made, nil
}

func (k *kitchen) named(name string, fill func(*layer)) func() ([]byte, error) {
	return func() ([]byte, error) { return k.layer(name, fill) }
}

// busybox has a shell of its own: some tests compare the words in which it complains.
func busybox(k *kitchen) (*image, error) {
	return k.stack(image{cmd: []string{"sh"}}, k.named("sh", func(l *layer) {
		l.file("/bin/sh", filepath.Join(k.programs, "sh"))
		// A test masks it, and must not mask all applets with it; and what Debian's busybox has not.
		l.file("/bin/ls", "/bin/busybox").program("/usr/bin/pgrep").program("/usr/bin/ipcs")
	}))
}

func withLayer(name string, fill func(*layer), made *image) func(*kitchen) (*image, error) {
	return func(k *kitchen) (*image, error) {
		if fill == nil {
			return k.stack(*made)
		}
		return k.stack(*made, k.named(name, fill))
	}
}

func oneProgram(name string) func(*kitchen) (*image, error) {
	return func(k *kitchen) (*image, error) {
		return k.stack(image{entrypoint: []string{"/" + name}}, k.named(name, func(l *layer) {
			l.file("/"+name, filepath.Join(k.programs, name))
		}))
	}
}

// sidecar is a storage driver or one of the programs beside it, with tools of Debian. No image if the program is not there.
func sidecar(name string, tools ...string) func(*kitchen) (*image, error) {
	return func(k *kitchen) (*image, error) {
		program := filepath.Join(k.drivers, name)
		if _, err := os.Stat(program); k.drivers == "" || os.IsNotExist(err) {
			return nil, nil
		}
		return k.stack(image{entrypoint: []string{"/" + name}}, k.named(name, func(l *layer) {
			l.file("/"+name, program)
			for _, tool := range tools {
				found, err := exec.LookPath(tool)
				if err != nil {
					l.fail(err)
					return
				}
				l.program(found)
			}
		}))
	}
}

// base is busybox with all its applets, and the files that a shell expects to find.
func base(l *layer) {
	l.file("/bin/busybox", "/bin/busybox")
	applets, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		l.fail(err)
	}
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			l.link("/bin/"+applet, "busybox")
		}
	}
	l.link("/usr/bin/env", "../../bin/busybox")
	// Debian's busybox, as a shell, prefers its own applets to programs and drops variables such as data-1.
	l.program("/bin/bash").link("/bin/sh", "bash")
	l.folder("/tmp", 0o1777).folder("/var/tmp", 0o1777).folder("/root", 0o700).folder("/home", 0o755).folder("/run", 0o755)
	l.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"+
		"user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n")
	l.text("/etc/group", "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\nuser-defined-in-image:x:1000:\n"+
		"group-defined-in-image:x:50000:user-defined-in-image\n")
	l.text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
}

// tools are the programs of agnhost's and the DNS image that busybox has not, or not well enough.
func tools(l *layer) {
	for _, program := range []string{
		"/usr/bin/dig", "/usr/bin/nslookup", "/usr/bin/host", "/usr/bin/curl", "/bin/nc.openbsd", "/bin/ss",
		"/bin/ip", "/usr/bin/ipcs", "/usr/bin/ipcmk", "/usr/bin/getent", "/usr/bin/iperf",
		// Debian's busybox is built without wget's time limits (-T), which the tests of services ask for.
		"/usr/bin/wget",
		// Debian's busybox has no printenv either.
		"/usr/bin/printenv",
	} {
		l.program(program)
	}
	l.link("/usr/bin/nc", "/bin/nc.openbsd").link("/usr/local/bin/iperf", "/usr/bin/iperf")
}

func iptables(l *layer) {
	l.debian("iptables").program("/usr/sbin/xtables-nft-multi").program("/usr/sbin/conntrack")
	l.link("/usr/sbin/iptables", "iptables-nft").link("/usr/sbin/ip6tables", "ip6tables-nft")
}

func agnhost(cmd string, more ...func(*kitchen, *layer)) func(*kitchen) (*image, error) {
	return func(k *kitchen) (*image, error) {
		layers := []func() ([]byte, error){k.named("tools", tools), k.named("agnhost", func(l *layer) {
			porter := filepath.Join(k.module, "test/images/agnhost/porter")
			l.file("/agnhost", filepath.Join(k.programs, "agnhost")).link("/agnhost-2", "agnhost").folder("/uploads", 0o755)
			l.file("/coredns", filepath.Join(k.programs, "coredns"))
			l.file("/localhost.crt", filepath.Join(porter, "localhost.crt")).file("/localhost.key", filepath.Join(porter, "localhost.key"))
			fakeRegistry(k, l)
		})}
		for _, fill := range more {
			layers = append(layers, func() ([]byte, error) {
				l := newLayer()
				fill(k, l)
				return l.tar()
			})
		}
		return k.stack(image{entrypoint: []string{"/agnhost"}, cmd: []string{cmd}}, layers...)
	}
}

// fakeRegistry lays the pause image out for agnhost's own small registry, which some tests pull from.
func fakeRegistry(k *kitchen, l *layer) {
	made, err := pause(k)
	if err != nil {
		l.fail(err)
		return
	}
	packed := newRegistry()
	manifest, blobs, err := packed.pack(made)
	if err != nil {
		l.fail(err)
		return
	}
	at := func(kind string, blob descriptor) string {
		hex := strings.TrimPrefix(blob.Digest, "sha256:")
		return "/var/registry/pause/" + kind + "/sha256/" + hex[:2] + "/" + hex + "/data"
	}
	l.text("/var/registry/pause/manifests/testing", manifest.Digest+"\n")
	l.text(at("manifests", manifest), string(packed.blobs[manifest.Digest]))
	for _, blob := range blobs {
		l.text(at("blobs", blob), string(packed.blobs[blob.Digest]))
	}
}

func picture(name string) func(*kitchen) (*image, error) {
	return agnhost("test-webserver", func(k *kitchen, l *layer) {
		html := filepath.Join(k.module, "test/images", name, "html")
		l.file("/"+name+".jpg", filepath.Join(html, name+".jpg")).file("/data.json", filepath.Join(html, "data.json"))
		// The suite's own image is built on Alpine, and the test of image volumes reads it there.
		l.text("/etc/os-release", "NAME=\"Alpine Linux\"\nID=alpine\n")
	})
}

func pause(k *kitchen) (*image, error) {
	bytes, err := k.layer("pause", func(l *layer) { l.file("/pause", filepath.Join(k.programs, "pause")) })
	return &image{layers: [][]byte{bytes}, entrypoint: []string{"/pause"}, user: "65535:65535"}, err
}

func nonewprivs(k *kitchen) (*image, error) {
	return k.stack(image{cmd: []string{"nnp"}}, k.named("nonewprivs", func(l *layer) {
		l.file("/usr/local/bin/nnp", filepath.Join(k.programs, "nonewprivs")).setuid("/usr/local/bin/nnp")
	}))
}

func etcd(l *layer) {
	l.program("/usr/bin/etcd")
	l.link("/usr/local/bin/etcd", "/usr/bin/etcd")
}

func nginx(l *layer) {
	l.program("/usr/sbin/nginx").file("/etc/nginx/mime.types", "/etc/nginx/mime.types")
	l.text("/etc/nginx/nginx.conf", `user www-data;
worker_processes 1;
pid /var/run/nginx.pid;
events { worker_connections 1024; }
http {
    include mime.types;
    access_log /dev/stdout;
    error_log /dev/stderr;
    server {
        listen 80 default_server;
        root /usr/share/nginx/html;
    }
}
`)
	l.text("/usr/share/nginx/html/index.html", "<!DOCTYPE html><title>Welcome to nginx!</title><h1>Welcome to nginx!</h1>\n")
	l.folder("/var/run", 0o755).folder("/var/log/nginx", 0o755).folder("/var/lib/nginx", 0o755).link("/var/log/nginx/error.log", "/dev/stderr")
}
