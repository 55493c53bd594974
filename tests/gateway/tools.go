//go:build tools

// Package gateway names what run.sh builds, so that go.mod keeps it.
package gateway

import (
	_ "sigs.k8s.io/gateway-api/conformance"
	_ "sigs.k8s.io/gateway-api/conformance/echo-basic"
)
