package main

import (
	"encoding/json"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// The types of statement that a release has. Cosign's signature of an image is a statement too,
// without content.
const (
	signaturePredicate  = "https://sigstore.dev/cosign/sign/v1"
	sbomPredicate       = "https://cyclonedx.org/bom"
	provenancePredicate = "https://slsa.dev/provenance/v1"
)

// statement says something about artifacts
// (https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md).
type statement struct {
	Type          string          `json:"_type"`
	Subject       []subject       `json:"subject"`
	PredicateType string          `json:"predicateType"`
	Predicate     json.RawMessage `json:"predicate"`
}

// subject names an artifact by its digest.
type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

const statementType = "https://in-toto.io/Statement/v1"

func newStatement(predicateType string, predicate any, subjects ...subject) (statement, error) {
	raw, err := json.Marshal(predicate)
	return statement{Type: statementType, Subject: subjects, PredicateType: predicateType, Predicate: raw}, err
}

func subjectOf(name string, d ocispec.Descriptor) subject {
	return subject{Name: name, Digest: map[string]string{digest.SHA256.String(): d.Digest.Encoded()}}
}
