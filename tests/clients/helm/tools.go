//go:build tools

// Package helm names the program that run.sh builds.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
