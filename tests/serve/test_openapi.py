"""The served OpenAPI document, and whatever fits it or does not: no 5xx, no undocumented answer."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.support import Running, request

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture
def document(server: Running) -> dict[str, Any]:
    status, document = request("GET", f"{server.url}/openapi.json")
    assert status == 200
    return document


def test_the_document_says_what_is_served(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"),
        *("/tokenize", "/detokenize", "/health", "/ready", "/metrics"),
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert {"denoising_steps", "confidence_threshold", "kv_budget"} <= set(fields)
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "examples", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_anything_a_client_sends(server: Running, document: dict[str, Any], examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    answered = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def call(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and "max_tokens" in case.body:
                case.body["max_tokens"] = 4  # any number is right, and 2,000 tokens take a while
            response = case.call(timeout=120)
            case.validate_response(response, checks=CHECKS)

        call()
        answered.add(operation.path)
    assert answered == set(document["paths"])
