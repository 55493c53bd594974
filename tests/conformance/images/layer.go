package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"sort"
	"strings"
)

// A layer is gathered by path and written in order, so that the same inputs give the same digest.
type layer struct {
	entries map[string]entry
	err     error
}

type entry struct {
	header tar.Header
	body   []byte
}

func newLayer() *layer { return &layer{entries: map[string]entry{}} }

func (l *layer) fail(err error) {
	if l.err == nil {
		l.err = err
	}
}

func (l *layer) put(name string, header tar.Header, body []byte) *layer {
	name = strings.TrimPrefix(path.Clean(name), "/")
	if parent := path.Dir(name); parent != "." {
		if _, there := l.entries[parent]; !there {
			l.folder(parent, 0o755)
		}
	}
	header.Name, header.Size, header.Format = name, int64(len(body)), tar.FormatGNU
	l.entries[name] = entry{header, body}
	return l
}

func (l *layer) folder(name string, mode int64) *layer {
	return l.put(name, tar.Header{Typeflag: tar.TypeDir, Mode: mode}, nil)
}

func (l *layer) text(name, body string) *layer {
	return l.put(name, tar.Header{Typeflag: tar.TypeReg, Mode: 0o644}, []byte(body))
}

func (l *layer) link(name, target string) *layer {
	return l.put(name, tar.Header{Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target}, nil)
}

// file copies a file of this machine, mode and all.
func (l *layer) file(name, source string) *layer {
	body, err := os.ReadFile(source)
	if err != nil {
		l.fail(err)
		return l
	}
	about, err := os.Stat(source)
	if err != nil {
		l.fail(err)
		return l
	}
	return l.put(name, tar.Header{Typeflag: tar.TypeReg, Mode: int64(about.Mode().Perm())}, body)
}

// setuid marks a file that is there already.
func (l *layer) setuid(name string) *layer {
	found := l.entries[strings.TrimPrefix(name, "/")]
	found.header.Mode |= 0o6000
	l.entries[strings.TrimPrefix(name, "/")] = found
	return l
}

// program copies a program of a Debian package together with the libraries that it is linked to.
func (l *layer) program(source string) *layer {
	l.file(source, source)
	output, err := exec.Command("ldd", source).CombinedOutput()
	if err != nil {
		if !strings.Contains(string(output), "not a dynamic executable") {
			l.fail(fmt.Errorf("ldd %s: %v: %s", source, err, output))
		}
		return l
	}
	for _, word := range strings.Fields(string(output)) {
		if strings.HasPrefix(word, "/") && !strings.HasSuffix(word, ":") {
			l.file(word, word)
		}
	}
	return l
}

// debian copies all files of an installed package but its documentation.
func (l *layer) debian(name string) *layer {
	output, err := exec.Command("dpkg", "-L", name).Output()
	if err != nil {
		l.fail(fmt.Errorf("dpkg -L %s: %v", name, err))
		return l
	}
	for _, file := range strings.Fields(string(output)) {
		if about, err := os.Stat(file); err != nil || !about.Mode().IsRegular() || strings.HasPrefix(file, "/usr/share/") {
			continue
		}
		l.file(file, file)
	}
	return l
}

func (l *layer) tar() ([]byte, error) {
	if l.err != nil {
		return nil, l.err
	}
	names := make([]string, 0, len(l.entries))
	for name := range l.entries {
		names = append(names, name)
	}
	sort.Strings(names)
	var out bytes.Buffer
	writer := tar.NewWriter(&out)
	for _, name := range names {
		found := l.entries[name]
		if err := writer.WriteHeader(&found.header); err != nil {
			return nil, err
		}
		if _, err := writer.Write(found.body); err != nil {
			return nil, err
		}
	}
	err := writer.Close()
	return out.Bytes(), err
}
