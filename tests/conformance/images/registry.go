package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

const (
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
)

// An image is layers, each a tar, and how its first process starts.
type image struct {
	layers     [][]byte
	entrypoint []string
	cmd        []string
	user       string
	workdir    string
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int    `json:"size"`
}

// registry answers the reading half of the OCI distribution protocol from memory.
type registry struct {
	blobs map[string][]byte
	tags  map[string]string
}

func newRegistry() *registry {
	return &registry{blobs: map[string][]byte{}, tags: map[string]string{}}
}

func (r *registry) count() int { return len(r.tags) }

func digest(bytes []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(bytes)) }

func (r *registry) blob(mediaType string, bytes []byte) descriptor {
	name := digest(bytes)
	r.blobs[name] = bytes
	return descriptor{mediaType, name, len(bytes)}
}

func (r *registry) add(name, tag string, made *image) error {
	manifest, _, err := r.pack(made)
	if err != nil {
		return err
	}
	r.tags[name+":"+tag] = manifest.Digest
	return nil
}

// pack returns the image's manifest, and the blobs that it names.
func (r *registry) pack(made *image) (descriptor, []descriptor, error) {
	var layers []descriptor
	var diffs []string
	for _, layer := range made.layers {
		described := r.blob(layerType, layer)
		layers = append(layers, described)
		diffs = append(diffs, described.Digest)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"config": map[string]any{
			"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			"Entrypoint": made.entrypoint,
			"Cmd":        made.cmd,
			"User":       made.user,
			"WorkingDir": made.workdir,
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	})
	if err != nil {
		return descriptor{}, nil, err
	}
	described := r.blob(configType, config)
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": described, "layers": layers,
	})
	if err != nil {
		return descriptor{}, nil, err
	}
	return r.blob(manifestType, manifest), append(layers, described), nil
}

func (r *registry) ServeHTTP(answer http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		http.Error(answer, "this registry can only be read", http.StatusMethodNotAllowed)
		return
	}
	rest, ok := strings.CutPrefix(request.URL.Path, "/v2/")
	if !ok {
		http.NotFound(answer, request)
		return
	}
	if rest == "" {
		return
	}
	name, mediaType := "", "application/octet-stream"
	if repository, reference, found := strings.Cut(rest, "/manifests/"); found {
		mediaType = manifestType
		if name = reference; !strings.HasPrefix(reference, "sha256:") {
			name = r.tags[repository+":"+reference]
		}
	} else if _, reference, found := strings.Cut(rest, "/blobs/"); found {
		name = reference
	}
	bytes, found := r.blobs[name]
	if !found {
		answer.Header().Set("Content-Type", "application/json")
		answer.WriteHeader(http.StatusNotFound)
		fmt.Fprint(answer, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
		return
	}
	answer.Header().Set("Content-Type", mediaType)
	answer.Header().Set("Docker-Content-Digest", name)
	answer.Header().Set("Content-Length", fmt.Sprint(len(bytes)))
	if request.Method == http.MethodGet {
		answer.Write(bytes)
	}
}
