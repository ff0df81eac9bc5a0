package main

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// provenance says how a release was made (https://slsa.dev/spec/v1.0/provenance). It has no time of
// the build and no name of the machine, so that a repeated build gives the same bytes.
type provenance struct {
	BuildDefinition struct {
		BuildType            string         `json:"buildType"`
		ExternalParameters   parameters     `json:"externalParameters"`
		InternalParameters   map[string]any `json:"internalParameters"`
		ResolvedDependencies []dependency   `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
	} `json:"runDetails"`
}

// parameters are what the person who makes a release chooses.
type parameters struct {
	Version  string `json:"version"`
	Registry string `json:"registry"`
	// Modified is true if the source differed from the commit.
	Modified bool `json:"modified"`
}

// dependency is what the build used.
type dependency struct {
	URI    string            `json:"uri"`
	Digest map[string]string `json:"digest"`
}

// buildType is the page that explains the parameters. builderID is who must be trusted: a person
// with the release key, on a machine of their own.
const (
	buildType = repository + "/blob/main/docs/releasing.md#provenance"
	builderID = repository + "/blob/main/docs/releasing.md#who-signs"
)

var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

func (b *build) provenance(ctx context.Context) (provenance, error) {
	var p provenance
	p.RunDetails.Builder.ID = builderID
	p.BuildDefinition.BuildType = buildType
	p.BuildDefinition.ExternalParameters = parameters{Version: b.version, Registry: b.registry, Modified: b.source.modified}
	internal := map[string]any{"release": runtime.Version()}
	uses := []dependency{b.source.dependency(b.version)}
	distribution, err := readDistribution()
	if err != nil {
		return p, err
	}
	for _, arch := range b.arches {
		info, err := buildinfo.ReadFile(filepath.Join(b.programs, arch, programs[0]))
		if err != nil {
			return p, err
		}
		compiler, err := exec.CommandContext(ctx, triplets[arch]+"-gcc", "--version").Output()
		if err != nil {
			return p, fmt.Errorf("find the version of the C compiler for %s: %w", arch, err)
		}
		first, _, _ := strings.Cut(string(compiler), "\n")
		internal[arch] = map[string]string{"go": info.GoVersion, "c": first}
		packages, err := debianPackages(filepath.Join(b.cLibraries, arch))
		if err != nil {
			return p, err
		}
		for _, used := range packages {
			raw, err := os.ReadFile(used.Path)
			if err != nil {
				return p, err
			}
			sum := sha256.Sum256(raw)
			uses = append(uses, dependency{URI: used.purl(distribution), Digest: map[string]string{"sha256": hex.EncodeToString(sum[:])}})
		}
	}
	for _, platform := range clientPlatforms {
		info, err := buildinfo.ReadFile(filepath.Join(b.clientDir(platform), client))
		if err != nil {
			return p, err
		}
		internal[client+"_"+platform.OS+"_"+platform.Architecture] = map[string]string{"go": info.GoVersion}
	}
	p.BuildDefinition.InternalParameters, p.BuildDefinition.ResolvedDependencies = internal, uses
	return p, nil
}
