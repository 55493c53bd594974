// sh is the shell of the busybox stand-in: busybox's own, whose messages tests compare. Debian's busybox drops
// environment variables whose names are no identifiers, such as data-1, which tests set and print; with one of those,
// bash is the shell.
package main

import (
	"fmt"
	"os"
	"regexp"
	"syscall"
)

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)

func main() {
	shell := "/bin/busybox"
	for _, variable := range os.Environ() {
		if !identifier.MatchString(variable) {
			shell = "/bin/bash"
		}
	}
	// Both shells look at the name they are called by.
	if err := syscall.Exec(shell, os.Args, os.Environ()); err != nil {
		fmt.Fprintln(os.Stderr, "sh:", err)
		os.Exit(127)
	}
}
